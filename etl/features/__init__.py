"""What a build makes of each feature, and checks of it before Spark starts."""
