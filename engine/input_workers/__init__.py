"""Processes that prepare the input of requests: the serving process can end them, whatever a request makes them do."""
