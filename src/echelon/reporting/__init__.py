"""Pages, terminal and live views, made from records alone."""
