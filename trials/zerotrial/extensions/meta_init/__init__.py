"""Models on the meta device or in files, filled unit by unit while stage 3 shards them."""
