"""The pure maths of the algorithms: tensors in, tensors out, no federation type."""
