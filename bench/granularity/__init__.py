"""What the GPU loses to each call of the driver."""
