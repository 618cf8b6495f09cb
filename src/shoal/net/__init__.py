"""Network layer: the signed HTTP client, the servers, object stores, rate limits and waits with deadlines. No torch here."""
