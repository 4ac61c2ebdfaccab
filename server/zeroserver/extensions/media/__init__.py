"""Media of trials: list, download and deletion of images, tables, texts, audio and files."""
