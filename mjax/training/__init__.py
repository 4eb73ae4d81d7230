"""The train step, its optimizer and precision, the loop around it, checkpoints and metrics."""
