"""Lightning callbacks that carry out, evaluate, count and save the federated rounds."""
