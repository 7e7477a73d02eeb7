// gpushare-device-plugin is the device plugin that reports a node's GPU memory to the kubelet, and allocates to each
// container the card that was chosen for its pod.
package main

import (
	"os"

	"github.com/gpushare/gpushare/cmd/internal/program"
)

func main() { os.Exit(program.Run(newCommand(os.LookupEnv))) }
