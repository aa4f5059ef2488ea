"""The engine's side: plan, allocation, telemetry, the fair scheduler's rules and the engines."""
