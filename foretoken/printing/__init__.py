"""Everything that foretoken prints goes through here: foreign text made visible, lines, tables, bars, Markdown."""
