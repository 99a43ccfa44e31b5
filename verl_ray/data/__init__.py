"""Records of files as rows of tokens: read, drawn, and what became of each."""
