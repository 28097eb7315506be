"""What a model is: its tensors, its bundle, its task. Knows no runtime, no network, no device."""
