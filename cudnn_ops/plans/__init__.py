"""Plans: how many are kept and where, when one is made, and who measures engines."""
