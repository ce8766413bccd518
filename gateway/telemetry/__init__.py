"""What is remembered of requests: the journal, time series, traces. Changes none of them."""
