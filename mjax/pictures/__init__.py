"""Pictures that mjax draws, each from plain values."""
