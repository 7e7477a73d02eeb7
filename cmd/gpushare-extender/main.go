// gpushare-extender is the scheduler extender that filters nodes by the free memory of their GPU cards, and binds pods
// together with the card that they get.
package main

import (
	"os"

	"github.com/gpushare/gpushare/cmd/internal/program"
)

func main() { os.Exit(program.Run(newCommand())) }
