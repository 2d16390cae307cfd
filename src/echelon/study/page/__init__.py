"""The study's page: charts first, then words, tables and what it takes to repeat it."""
