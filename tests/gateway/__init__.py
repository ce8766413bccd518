"""The gateway: pure routing, the way to engines, and the whole process against scripted engines."""
