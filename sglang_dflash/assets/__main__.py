"""Prepare the demo pair and print its folders."""

from sglang_dflash.assets import demo_drafter, demo_target

print(f"target: {demo_target()}")
print(f"drafter: {demo_drafter()}")
