from lightning_fed.cli.main import run

if __name__ == "__main__":
    run()
