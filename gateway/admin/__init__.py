"""What operators and dashboards ask a gateway: workers, figures, requests. Reads; changes nothing."""
