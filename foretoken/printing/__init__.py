"""All output of foretoken: escaping of foreign text, lines, tables, bars, Markdown."""
