package controlplane

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// Shell runs commands as an administrator would: with bash, and the first that fails ends them.
type Shell struct {
	// Dir is the working directory, Path the folders that come before those of PATH, separated by colons.
	Dir, Path        string
	Home, Kubeconfig string
}

// Run returns what the commands print. They read input. The error has the commands and what they print.
func (s Shell) Run(ctx context.Context, commands, input string) (string, error) {
	command := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	command.Dir, command.Stdin = s.Dir, strings.NewReader(input)
	command.Env = []string{"HOME=" + s.Home, "PATH=" + s.Path + ":" + os.Getenv("PATH"), "KUBECONFIG=" + s.Kubeconfig}
	out, err := command.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", commands, err, out)
	}
	return string(out), err
}
