"""A server of exported models: TensorFlow Serving's REST API, recommendations, a page."""
