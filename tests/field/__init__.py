"""Cases that killed people's runs elsewhere."""
