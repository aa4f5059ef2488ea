"""The Gymnasium environment over any engine: features, actions and reward."""
