"""SavedModels, embedding files and ranked lists of a trained model."""
