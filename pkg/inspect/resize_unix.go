//go:build unix

package inspect

import (
	"os"
	"os/signal"
	"syscall"
)

// resized tells when the terminal gets another size, until stop is called.
func resized() (changes <-chan os.Signal, stop func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	return ch, func() { signal.Stop(ch) }
}
