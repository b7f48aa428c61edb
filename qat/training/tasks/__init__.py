"""Tasks that a run can learn: losses, scores, and torchvision's models for each."""
