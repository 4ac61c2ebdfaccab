"""MLflow's REST API: tracking and artifacts for unchanged MLflow clients, below `/mlflow`."""
