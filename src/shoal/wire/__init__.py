"""What crosses a border. Every format is one frozen record, parsed once at the door. No torch here."""
