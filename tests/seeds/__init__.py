"""The literal configurations, requests and answers of the five systems that this project unites."""
