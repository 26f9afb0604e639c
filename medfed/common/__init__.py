"""What everything else stands on: errors, tensors, seeds, files, console, figures."""
