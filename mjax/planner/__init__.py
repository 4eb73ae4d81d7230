"""What a run will cost, said before it starts. Nothing here touches a device."""
