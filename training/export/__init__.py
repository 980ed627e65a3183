"""SavedModels, and files of embeddings and tables, of a trained model."""
