"""Records of finished requests: journal, time series and traces."""
