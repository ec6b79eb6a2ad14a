"""What the GPU check measures, a file a part."""
