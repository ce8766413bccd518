"""The join port: machines get their first certificate here, by a token or by the approval of an administrator."""
