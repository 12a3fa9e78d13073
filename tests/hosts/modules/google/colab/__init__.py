"""google.colab as far as f5kit meets it: the interface of the module in Colab's image, backed by local files."""
