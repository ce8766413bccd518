"""Configuration for Prometheus and Grafana: scrape config, alert rules, dashboards. Pure functions."""
