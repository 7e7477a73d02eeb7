//go:build unix

package inspect

import (
	"os"
	"os/signal"
	"syscall"
)

// resized returns a channel that receives a value when the size of the terminal changes, until stop is called.
func resized() (changes <-chan os.Signal, stop func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	return ch, func() { signal.Stop(ch) }
}
