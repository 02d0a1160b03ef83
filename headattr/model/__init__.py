"""What a head computes: frozen linear maps read from a Hugging Face model, one file a family."""
