"""All that knows there is more than one device. This package imports no model."""
