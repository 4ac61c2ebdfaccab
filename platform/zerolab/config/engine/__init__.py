"""The engine file: DeepSpeed's JSON, section by section."""
