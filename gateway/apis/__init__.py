"""APIs other than OpenAI's, as translations: requests become OpenAI's, engines' answers are told back. No I/O."""
