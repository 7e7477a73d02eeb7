//go:build !linux

package main

// calm does nothing on systems without timer slack.
func calm() {}
