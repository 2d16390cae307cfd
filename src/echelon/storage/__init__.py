"""Files by URL: put, get, list, conditional put. It does not know what it stores."""
