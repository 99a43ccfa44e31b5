"""The data plane: ragged columns, frozen stage types, rows by reference."""
