"""What tables say of each kind of object: columns over trees. Pure; imports no kind's type."""
