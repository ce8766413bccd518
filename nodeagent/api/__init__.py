"""What an agent answers over HTTP: how it is, its figures, its log and its engines' logs. Changes nothing."""
