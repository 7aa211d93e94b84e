"""Model generators: the seam between the engine and whatever computes logits."""
