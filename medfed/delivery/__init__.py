"""Models for hospitals: MONAI Bundles with packed weights, ONNX files, prediction."""
