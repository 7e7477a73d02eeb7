//go:build !linux

package main

// calm does nothing where there is no timer slack.
func calm() {}
