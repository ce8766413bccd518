"""`fleetctl patch`: some fields of an object, by a merge patch (RFC 7386) or a JSON patch (RFC 6902)."""
